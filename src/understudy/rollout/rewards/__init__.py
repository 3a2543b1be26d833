"""Rewards: shipped ones, those a recipe names, and the threads they run on."""
