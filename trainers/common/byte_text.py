"""A number of bytes -> how people write it."""


def bytes_to_text(size: int) -> str:
    """12.3 GiB, or 345 MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{max(size, 2**20) / 2**20:.0f} MiB"
