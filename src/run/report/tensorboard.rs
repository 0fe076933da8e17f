//! Writes curves as a TensorBoard event file: the records of `tensorflow/core/util/event.proto` and
//! `framework/summary.proto`, framed as TFRecords (tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format
//! details").

/// An event file in memory.
#[derive(Debug)]
pub(super) struct Events {
    bytes: Vec<u8>,
    /// Timestamp of every record, in seconds since the Unix epoch.
    time: f64,
}

impl Events {
    /// Creates a file that has only its version record.
    pub fn new(time: f64) -> Self {
        let mut events = Self { bytes: Vec::new(), time };
        let mut event = Message::default();
        event.double(1, time);
        event.text(3, b"brain.Event:2");
        events.record(&event.0);
        events
    }

    /// Adds the values of a step.
    pub fn step<'a>(&mut self, step: u64, values: impl IntoIterator<Item = (&'a str, f32)>) {
        let (mut event, mut summary) = (Message::default(), Message::default());
        for (tag, number) in values {
            let mut value = Message::default();
            value.text(1, tag.as_bytes());
            value.float(2, number);
            summary.text(1, &value.0);
        }
        event.double(1, self.time);
        event.number(2, step);
        event.text(5, &summary.0);
        self.record(&event.0);
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Appends a framed record: length, its checksum, data, their checksum.
    fn record(&mut self, data: &[u8]) {
        let length = (data.len() as u64).to_le_bytes();
        for part in [&length[..], &masked(crc32c(&length)).to_le_bytes(), data, &masked(crc32c(data)).to_le_bytes()] {
            self.bytes.extend_from_slice(part);
        }
    }
}

/// A message in the wire format of protocol buffers.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn number(&mut self, field: u64, number: u64) {
        self.varint(field << 3);
        self.varint(number);
    }

    fn double(&mut self, field: u64, number: f64) {
        self.varint(field << 3 | 1);
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn float(&mut self, field: u64, number: f32) {
        self.varint(field << 3 | 5);
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    /// Adds a field that is a string, bytes, or another message.
    fn text(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }
}

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4), computed bit by bit, since a record has only some hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let of_byte = |crc: u32, byte: &u8| {
        let bit = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        (0..8).fold(crc ^ u32::from(*byte), bit)
    };
    !bytes.iter().fold(!0, of_byte)
}

/// The masked form in which TFRecords store checksums.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // 32 zeros, and 32 ones: RFC 3720, appendix B.4.
        assert_eq!((crc32c(&[0; 32]), crc32c(&[0xff; 32])), (0x8a91_36aa, 0x62a8_ab43));
    }

    #[test]
    fn records_are_those_of_tensorboard() {
        let mut events = Events::new(1.0);
        let begun = events.bytes.len();
        events.step(300, [("loss", 2.0)]);
        let bytes = events.into_bytes();
        // 9 bytes of time, and 2 + 13 bytes of version.
        assert_eq!((bytes[0], begun), (24, 8 + 4 + 24 + 4));
        let record = &bytes[begun + 12..bytes.len() - 4];
        let time = [&[0x09][..], &1f64.to_le_bytes()].concat();
        let value = [&[0x0a, 4][..], b"loss", &[0x15], &2f32.to_le_bytes()].concat();
        let summary = [&[0x0a, value.len() as u8][..], &value].concat();
        let step = [0x10, 0xac, 0x02, 0x2a, summary.len() as u8];
        assert_eq!(record, [&time[..], &step, &summary].concat());
    }
}
