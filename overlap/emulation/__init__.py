"""Emulated collectives: one process, one device, and the time that a group of n ranks would take.

    link = EmulatedLink(bandwidth=50, ctas=8)
    emulation.init_process_group(link, world_size=8)
    groups = ProcessGroups.build(device_type="cuda")      # and on as with any other backend

This process is rank 0 of a group whose other ranks do not exist. Every collective keeps its stream,
its order and its SMs busy for as long as `EmulatedLink` says that the bytes would travel, so that
what hides on a cluster hides here, and what does not, does not. Its values are those of peers that
hold the same data as this rank: a gather repeats the own shard, a sum is the own value times n.
Nothing measured with it is a measurement of a network.
"""

from overlap.emulation.group import EmulatedProcessGroup, init_process_group, link_of, register
from overlap.emulation.link import EmulatedLink

__all__ = ["EmulatedLink", "EmulatedProcessGroup", "init_process_group", "link_of", "register"]
