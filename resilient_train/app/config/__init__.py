"""The configuration of the command, and all of its use of Hydra."""

from resilient_train.files import conf

CONF = conf()
