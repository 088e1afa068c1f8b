"""Files of media: references opened, headers probed, pixels and samples decoded."""
