"""The distributed optimizer's collectives, hidden under compute."""
