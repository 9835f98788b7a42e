"""What a run is made of, as what it is: extensions build on these."""
