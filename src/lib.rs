//! gapless: an LLM training engine whose memory has no gaps.
