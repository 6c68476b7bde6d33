"""Whisper: speech to text (Radford et al. 2022), after openai/whisper."""
