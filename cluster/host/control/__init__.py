"""Operations on runs: watch, scale, trace, inject faults, end, clean up."""
