"""The parts of `tools/pard_adapt.py`: mask token, text, layout of a training pass, adaptation."""
