// Search on a site that is opened as files: browsers start no worker there, so a hidden frame runs the worker's script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.addEventListener("message", ({ data }) => this.dispatchEvent(new MessageEvent("message", { data })));
      this.ready = new Promise((resolve) => this.frame.addEventListener("ready", resolve));
      document.body.append(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write(`
        <script>postMessage = (data) => frameElement.dispatchEvent(new MessageEvent("message", { data }))</script>
        <script src="${url}" onload="frameElement.dispatchEvent(new Event('ready'))"></script>`);
      page.close();
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
