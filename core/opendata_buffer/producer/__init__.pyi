from opendata_buffer.producer.producer import Producer as Producer
