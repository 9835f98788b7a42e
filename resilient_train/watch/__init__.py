"""Vitals, scans and the checks that judge them: measured on the device, read back one update later."""
