"""What tests share: stand-ins, rigs, and the writers of generated pages."""
