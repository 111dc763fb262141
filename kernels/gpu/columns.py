"""Layout of tables on the device: the columns of a plan, the bits of a mark."""


class EntryColumn:
    """A plan on the device, int32 [8, entries]: each entry is one sequence's share of a pass."""

    ROW = 0  # in the tables of rows
    NUM_TOKENS = 1
    START = 2  # position of the first token; negative: the last committed one, then drafts
    DEPTH = 3  # drafts among the tokens; negative: none of the tokens predicts anything
    FIRST_TOKEN = 4
    FIRST_TILE = 5
    FIRST_LOGIT = 6
    DRAFTED = 7  # by a model with KV of its own, verified or not
    SIZE = 8


class TotalColumn:
    """Totals of a pass, int32 [6]; a captured pass pads beyond them."""

    TOKENS = 0
    TILES = 1
    LOGITS = 2
    ENTRIES = 3
    SELECTED = 4  # drafts to verify in all; negative: those of every entry's depth
    TILE_TOKENS = 5  # the most a tile holds
    SIZE = 6


class Mark:
    """The bits of a token's mark: its adjustments in one row, and its count there."""

    COUNT_BITS = 20  # lowest: occurrences in the output
    BIAS_SHIFT = 20  # then 9 bits: index of the row's bias; 0: none
    MAX_BIASES = 511
    IN_PROMPT = 1 << 29  # and penalized for it
    BARRED_EARLY = 1 << 30  # at positions before `AdjustTable.late_from`
    BARRED_LATE = 1 << 31  # from there on
