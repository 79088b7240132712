"""JAX's own tests of `jax.checkpoint`, with `remat_opt.checkpoint` in its place; `docs/checkpoint.md` names what fails.

    git -C <a clone of JAX> show jax-v0.10.2:tests/api_test.py > /tmp/api_test.py
    python -m benchmarks.jax_checkpoint_tests /tmp/api_test.py [test names ...]

The file has to be that of the installed JAX. Nothing is fetched. `--plain` runs the tests with `jax.checkpoint`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import types
import unittest
from pathlib import Path

CLASS = "RematTest"
THEIRS = re.compile(r"\bjax\.(checkpoint|remat)\b")


def load(path: Path, *, plain: bool) -> types.ModuleType:
    """The tests as a module in which each `jax.checkpoint` and `jax.remat` reads `remat_opt.checkpoint`."""
    text = path.read_text()
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    if not plain:
        import remat_opt

        text = THEIRS.sub("remat_opt.checkpoint", text)
        module.__dict__["remat_opt"] = remat_opt
    sys.modules[path.stem] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="JAX's tests/api_test.py, of the installed version")
    parser.add_argument("names", nargs="*", help="tests to run; default: all")
    parser.add_argument("--plain", action="store_true", help="with jax.checkpoint itself")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    module = load(arguments.path, plain=arguments.plain)
    module.config.config.parse_flags_with_absl()
    tests = getattr(module, CLASS)
    names = arguments.names or unittest.defaultTestLoader.getTestCaseNames(tests)
    result = unittest.TextTestRunner(verbosity=1).run(unittest.TestSuite(map(tests, names)))
    failed = sorted(test.id().split(".")[-1] for test, _ in (*result.failures, *result.errors))
    passed = result.testsRun - len(failed) - len(result.skipped)
    print(f"{passed} of {result.testsRun} passed, {len(result.skipped)} skipped by JAX, failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
