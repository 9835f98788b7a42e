"""The endless stream of samples, the cursor in it, and rows that come out the same every time."""
