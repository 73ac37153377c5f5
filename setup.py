"""Builds the optional C kernel; everything else about the package is in pyproject.toml.

Without a compiler the build goes on without it, and kvkeep falls back to numpy
(docs/decisions/0004-native-copy.md)."""

from setuptools import Extension, setup

setup(
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
    ]
)
