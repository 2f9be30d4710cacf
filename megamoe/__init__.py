"""The MoE layer whose two expert weights live in two modules and whose compute is two stages."""
