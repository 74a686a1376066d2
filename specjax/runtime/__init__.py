"""KV pool and pages, paged attention, compiled functions and the state on the device."""
