"""Builds and runs a program with the package, by CMake and by Meson with pkg-config."""
import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.gnu import PkgConfigDeps
from conan.tools.meson import Meson, MesonToolchain


class UsesRemat(ConanFile):
    settings = 'os', 'arch', 'compiler', 'build_type'

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        self.folders.build = os.path.join('build', str(self.settings.build_type))
        self.folders.generators = os.path.join(self.folders.build, 'generators')

    def generate(self):
        CMakeToolchain(self).generate()
        PkgConfigDeps(self).generate()
        MesonToolchain(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()
        meson = Meson(self)
        meson.configure()
        meson.build()

    def test(self):
        if can_run(self):
            for program in ('by_cmake', 'by_meson'):
                self.run(os.path.join(self.build_folder, program), env='conanrun')
