//! Whether the own record fits its store.
//!
//! A record that does not would be tried again for ever, and peers would see no later change
//! either. So whatever makes it grow on purpose, memory and NICs, is refused before that.

use rerail_metadata::descriptor::{JsonForm, SegmentDescriptor};

use crate::Result;
use crate::directory::Directory;
use crate::publication::Publication;

/// Whether the record of the segment `name` fits, whatever becomes of its NICs; with `more`, also
/// with a NIC of that name.
///
/// # Errors
///
/// The store's own, with both sizes and what can be done.
pub(crate) fn check(
    directory: &Directory,
    publication: &Publication,
    name: &str,
    more: Option<&str>,
) -> Result<()> {
    fits(directory, || publication.largest(more), name)
}

/// Whether a record of the segment `name`, `largest` at the most, fits. Errors as in [`check`].
pub(crate) fn fits(
    directory: &Directory,
    largest: impl FnOnce() -> SegmentDescriptor,
    name: &str,
) -> Result<()> {
    let Some((store, keys)) = directory.store() else {
        return Ok(());
    };
    if store.capabilities().value_bytes_max.is_none() {
        return Ok(());
    }
    // With the longer of the two forms' endings.
    let record = largest().to_json(JsonForm::Line);
    store.check_size(&keys.segment(name), record.len())?;
    Ok(())
}
