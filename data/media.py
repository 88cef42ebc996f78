"""The one door to media files: probe, read a clip, stream frames, write MP4. Nobody else knows containers."""

from data.media_probe import probe
from data.media_read import Unreadable, iter_frames, read_clip, read_sound
from data.media_write import write_media, write_mp4

__all__ = ["Unreadable", "iter_frames", "probe", "read_clip", "read_sound", "write_media", "write_mp4"]
