"""The parts of `tools/train_tiny.py`: text, tokenizers, model, training, drafts, evaluation."""
