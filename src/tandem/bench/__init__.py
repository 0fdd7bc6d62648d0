"""Measurements: speed by depth, kernels, against the measured ceilings of the machine. Each ends in one JSON line."""
