"""How a model is cut over machines: hardware, roofline estimator, calibration, optimizer."""
