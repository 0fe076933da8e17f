"""Builds the library with cargo, and puts it into the package."""

import os
import pathlib
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent


class Build(build_py):
    def run(self):
        super().run()
        library = os.environ.get("GAPLESS_TORCH_LIBRARY")
        if not library:
            crate = HERE.parent
            subprocess.check_call(["cargo", "build", "--release", "-p", "gapless-torch"], cwd=crate)
            target = os.environ.get("CARGO_TARGET_DIR", crate.parent.parent / "target")
            library = pathlib.Path(target) / "release" / "libgapless_torch.so"
        # An editable install imports the package from here.
        folder = HERE if getattr(self, "editable_mode", False) else pathlib.Path(self.build_lib)
        shutil.copy(library, folder / "gapless_torch" / "libgapless_torch.so")


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build}, distclass=Binary)
