"""Builds the native libraries with CMake and puts them into cerberus_kernels/lib."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARIES = ("libcerberus_cpu.so", "libcerberus_ffi.so")


class CMakeBuild(build_ext):
    """One CMake run in place of setuptools' compiler; the libraries are plain files, not Python modules."""

    def run(self) -> None:
        import tvm_ffi.libinfo

        source_hash = runpy.run_path(str(ROOT / "cerberus_kernels" / "source_hash.py"))["source_hash"]
        build = Path(self.build_temp).resolve() / "cmake"
        destination = self.destination().resolve()
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            "-DCERBERUS_PYTHON=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dtvm_ffi_DIR={tvm_ffi.libinfo.find_cmake_path()}",
            f"-DCERBERUS_PYTHON_DESTINATION={destination}",
            f"-DCERBERUS_SOURCE_HASH={source_hash(ROOT / 'csrc')}",
            *os.environ.get("CERBERUS_CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
        subprocess.run(["cmake", "--install", str(build), "--component", "python"], check=True)

    def destination(self) -> Path:
        """Folder for the libraries: in the source tree for an editable install, else in the build tree."""
        base = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        return base / "cerberus_kernels" / "lib"

    def get_outputs(self) -> list[str]:
        return [str(self.destination() / name) for name in LIBRARIES]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.editable_mode:
            return {}
        built = Path(self.build_lib) / "cerberus_kernels" / "lib"
        return {str(built / name): str(self.destination() / name) for name in LIBRARIES}


setup(ext_modules=[Extension("cerberus_kernels.lib", sources=[])], cmdclass={"build_ext": CMakeBuild})
