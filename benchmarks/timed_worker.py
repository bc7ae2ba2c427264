from placement.calibration.timed_worker import TimedCPUWorker  # noqa: F401
