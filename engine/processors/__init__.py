"""What a table asks of the device that its rows are used on, and the devices that answer."""
