"""`fasteagle serve`: one loaded model behind HTTP, in the form of OpenAI's API."""
