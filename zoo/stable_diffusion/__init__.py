"""Stable Diffusion: text to image (Rombach et al. 2022), after CompVis/stable-diffusion."""
