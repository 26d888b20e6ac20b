"""What every package uses: errors, files, progress, terminal text, servers on loopback."""
