"""Parameters and sums over ranks: who holds which elements, who adds up what. Knows no rule."""
