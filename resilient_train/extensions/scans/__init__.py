"""Scans of the state: measured on the device, judged an update later."""
