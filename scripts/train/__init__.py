"""The parts of ``scripts/train_fuel.py``."""
