"""Builds the optional C kernel; everything else about the package is in pyproject.toml.

Without a compiler the build goes on without it, and kvkeep falls back to numpy
(docs/decisions/0004-native-copy.md). The kernel does not use Python's C API, so neither its file nor
the wheel is tied to a version of Python: one wheel serves all versions on an architecture."""

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildKernel(build_ext):
    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"


class BuildWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": BuildWheel},
    ext_modules=[
        Extension(
            "kvkeep.kv._native",
            sources=[
                "src/kvkeep/kv/_native.c",
                "src/kvkeep/kv/_guard.c",
                "src/kvkeep/kv/_keys.c",
                "src/kvkeep/kv/_climb.c",
                "src/kvkeep/gpu/_drive.c",
            ],
            extra_compile_args=["-O3", "-g0", "-std=gnu11"],
            optional=True,
        )
    ],
)
