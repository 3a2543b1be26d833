"""`plan --simulate`: steps simulated from measured phases."""
