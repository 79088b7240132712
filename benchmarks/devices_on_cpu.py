"""Several devices that the CPU stands in for."""

import os

THREADS = 64
PATIENCE = 600  # seconds; the runtime's own are 40, which a busy machine takes


def environment(devices: int) -> dict[str, str]:
    """Variables that let the CPU be so many devices, to be set before JAX is imported.

    A collective waits for the other devices in a thread of the pool that all devices share, which is by default as
    large as the machine has cores or devices. Where a device may run several collectives at once these can fill the
    pool, and then wait for each other for ever; XLA ends the process after a while.

    Args:
        devices: of this process.
    """
    flags = (
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices}",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={PATIENCE}",
    )
    return {"XLA_FLAGS": " ".join(flags), "NPROC": str(THREADS)}
