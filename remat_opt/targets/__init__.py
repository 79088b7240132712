"""Compilers, of devices that are attached or absent, and the figures they report.

`target.py` is the `Target`, `gpus.py` and `tpus.py` have the tables of devices (a new one is an entry), `devices.py`
finds the one that is meant. `compile.py` compiles for one, `remote.py`, `worker.py` and `export.py` do so in a child
process for an absent device, `figures.py` is what a compiler says, `options.py` the compiler options that a rewritten
step needs. `callbacks.py` replaces host callbacks in the copy that is compiled for an absent device, `kernels.py` says
for which GPU Pallas writes its kernels there; `communication.py` reads the collectives of compiled programs;
`errors.py` has the errors.
"""

from remat_opt.targets.compile import compile_lowered as compile_lowered
from remat_opt.targets.compile import is_attached as is_attached
from remat_opt.targets.compile import measure_flat as measure_flat
from remat_opt.targets.devices import TARGETS as TARGETS
from remat_opt.targets.devices import attached_target as attached_target
from remat_opt.targets.devices import resolve_target as resolve_target
from remat_opt.targets.errors import CompilationFailed as CompilationFailed
from remat_opt.targets.errors import CompilationOutOfMemory as CompilationOutOfMemory
from remat_opt.targets.errors import ProgramNotPortable as ProgramNotPortable
from remat_opt.targets.errors import TargetUnavailable as TargetUnavailable
from remat_opt.targets.figures import Figures as Figures
from remat_opt.targets.figures import read_figures as read_figures
from remat_opt.targets.gpus import gpu_config as gpu_config
from remat_opt.targets.remote import Worker as Worker
from remat_opt.targets.remote import check_installed as check_installed
from remat_opt.targets.remote import close_workers as close_workers
from remat_opt.targets.remote import extra_for as extra_for
from remat_opt.targets.remote import is_installed as is_installed
from remat_opt.targets.target import Target as Target
