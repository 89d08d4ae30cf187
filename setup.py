"""What pyproject.toml cannot say: the native extension, and the .pth file that reads ``DPRO``."""

from __future__ import annotations

from distutils.command.install_data import install_data
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Distribution, setup


class AskedForData(Distribution):
    """An editable build runs install_data only if ``has_data()``; setuptools named it has_data_files."""

    def has_data(self) -> bool:
        return bool(self.data_files)


class InstallBesidePackages(install_data):
    """Puts ``data_files`` into site-packages (install_lib), where Python looks for .pth files.

    This holds for wheels and for editable installs alike: both run this command.
    """

    def finalize_options(self) -> None:
        self.set_undefined_options("install", ("install_lib", "install_dir"))
        super().finalize_options()


ParallelCompile("DPRO_BUILD_JOBS").install()  # all cores, unless this variable names a number

setup(
    distclass=AskedForData,
    ext_modules=[
        Pybind11Extension(
            "dpro._native",
            sorted(glob("core/native/*.cpp")),
            depends=sorted(glob("core/native/*.hpp")),
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
        )
    ],
    data_files=[("", ["dpro_autoload.pth"])],
    cmdclass={"install_data": InstallBesidePackages},
)
