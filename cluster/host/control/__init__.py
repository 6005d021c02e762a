"""Operations on runs: watching, scaling, tracing, injecting faults, uploading, ending and deleting."""
