"""HTTP service in OpenAI's format over planned models, on Ray Serve. Imported only by serving programs."""
