"""Capabilities: each can be deleted, and others can add one."""
