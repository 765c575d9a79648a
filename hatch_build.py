"""Build hook: a wheel has the native library if there is a compiler, and is a wheel for this platform then."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # the library is built on first use
            return
        # The module alone: the package needs torch, which a build environment does not have.
        file = Path(self.root, "src/regard/inference/native_library.py")
        spec = importlib.util.spec_from_file_location("native_library", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            path = module.build_library(module.SOURCES)
        except (OSError, module.NoLibraryError) as error:
            self.app.display_warning(f"no native library in this wheel: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )
        build_data["force_include"][str(path)] = f"regard/inference/native/{path.name}"
