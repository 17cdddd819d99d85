"""Tools for anybody's training: prove, overlap, hang, doctor."""
