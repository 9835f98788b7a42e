"""Vitals: measured on the device with every update, read back when somebody looks."""
