"""Healthy programs that change on purpose; each trains its twin, too, which is damaged there instead."""
