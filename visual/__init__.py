"""Drawing of recorded runs: plain infos, Plotly figures, and the player that shows them in a browser; no torch."""
