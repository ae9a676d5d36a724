"""Random graphs against eager torch."""
