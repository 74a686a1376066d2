"""The model runner: its sizes, compiled functions and state on the device."""
