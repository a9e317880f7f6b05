"""The recipe for Conan 2, of this tree: the LibTorch that the library is for is named by an option.

    conan create packaging/conan -o "&:torch_root=/folder" -s compiler.cppstd=20
"""
import os

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load
from conan.tools.gnu import PkgConfig
from conan.tools.layout import basic_layout
from conan.tools.meson import Meson, MesonToolchain

BUILT_OF = ('meson.build', 'meson_options.txt', 'LICENSE', 'README.md', 'CHANGELOG.md', 'docs/*',
            'hooks/*', 'include/*', 'lib/*',
            'packaging/*', 'subprojects/*.wrap', 'subprojects/packagefiles/*', 'tools/*')


class Remat(ConanFile):
    name = 'remat'
    license = 'MIT'
    description = 'Activation checkpointing for LibTorch through saved-tensor hooks'
    topics = ('libtorch', 'autograd', 'activation-checkpointing')
    package_type = 'shared-library'
    # No build_type: what LibTorch's classes look like depends on NDEBUG, so all is built as
    # LibTorch's binaries are.
    settings = 'os', 'arch', 'compiler'
    options = {'torch_root': ['ANY']}
    default_options = {'torch_root': ''}

    @property
    def tree(self):
        return os.path.join(self.recipe_folder, '..', '..')

    def set_version(self):
        words = load(self, os.path.join(self.tree, 'include', 'remat', 'version.h')).split('"')
        self.version = words[1]

    def export_sources(self):
        for pattern in BUILT_OF:
            copy(self, pattern, self.tree, self.export_sources_folder,
                 excludes=('packaging/conan/*', '*/__pycache__/*'))

    def layout(self):
        basic_layout(self, src_folder='.')

    def validate(self):
        if self.settings.os != 'Linux':
            raise ConanInvalidConfiguration('remat is for Linux.')
        if not self.options.torch_root:
            raise ConanInvalidConfiguration(
                'A binary of remat is for one LibTorch. Name its folder, which holds include/ and '
                'lib/: -o "remat/*:torch_root=/folder"')
        check_min_cppstd(self, 20)

    def generate(self):
        toolchain = MesonToolchain(self)
        toolchain.project_options.update({'torch_root': str(self.options.torch_root),
                                          'tests': 'disabled', 'examples': 'disabled',
                                          'bench': 'disabled', 'python': 'disabled'})
        toolchain.generate()

    def build(self):
        meson = Meson(self)
        meson.configure()
        meson.build()

    def package(self):
        Meson(self).install()

    def package_info(self):
        # The installed files say it already, LibTorch's folders and flags among it.
        installed = PkgConfig(self, 'remat',
                              pkg_config_path=os.path.join(self.package_folder, 'lib', 'pkgconfig'))
        installed.fill_cpp_info(self.cpp_info, is_system=False, system_libs=['pthread'])
        # CMake takes the package's own file, which also looks whether the program's LibTorch is of
        # the same version.
        self.cpp_info.set_property('cmake_find_mode', 'none')
        self.cpp_info.builddirs = [os.path.join('lib', 'cmake', 'remat')]
