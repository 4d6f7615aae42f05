MAX_DRAFT_TOKENS: int
CELLS_SHAPE: tuple[int, int]
