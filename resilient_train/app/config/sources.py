"""The files that Hydra reads, looked at first: one of a few lines may unfold to more than a machine holds."""

from __future__ import annotations

from pathlib import Path

import yaml
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult

from resilient_train.errors import unusable
from resilient_train.files import conf, read_yaml_text

CONF = conf()


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's own, which it keeps by this name; one of the package's files is read as it is."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file, or say in one line why it is no configuration."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        if file.is_relative_to(CONF) or not file.exists():
            return super().load_config(config_path)
        try:
            read_yaml_text(file)
            return super().load_config(config_path)
        except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            raise unusable(str(file), f"is no configuration: {' '.join(str(error).split())[:300]}") from error


def look_first() -> None:
    """Let Hydra read files this way, in this process."""
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = FileConfigSource
