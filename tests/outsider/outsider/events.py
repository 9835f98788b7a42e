"""Writes all events of a run into the file that OUTSIDER_EVENTS names."""

import json
import os

from resilient_train.extensions import Extension, Sink


class Lines(Sink):
    def __init__(self, path):
        self.file = open(path, "a", encoding="utf-8")

    def write(self, event):
        self.file.write(json.dumps(event, default=str) + "\n")
        self.file.flush()

    def close(self):
        self.file.close()


class Events(Extension):
    def build(self, run):
        path = os.environ.get("OUTSIDER_EVENTS")
        if path and run.world.is_main:  # each rank comes here, and events are those of rank 0
            run.sinks.append(Lines(path))
